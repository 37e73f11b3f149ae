"""`python -m sits_trt` is the command line."""

from sits_trt.cli import main

main()
