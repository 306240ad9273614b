"""The README's pictures, of real runs: `make screenshot`."""
