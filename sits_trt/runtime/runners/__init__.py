"""What turns a step's arrays into logits: the interface in `base`, one file for each implementation."""
