"""Takes the pictures in the documents from real runs: `make screenshot`."""
