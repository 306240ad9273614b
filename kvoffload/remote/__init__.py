"""An existing distributed store below the host and the disk, which engines share. Starts no thread."""
