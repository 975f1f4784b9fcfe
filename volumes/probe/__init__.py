"""An independent verdict on what a block device holds."""
