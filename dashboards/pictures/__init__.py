"""Takes the README's pictures of real runs: `make screenshot`."""
