"""`python -m nas` equals `nas`."""

from nas.cli import main

if __name__ == "__main__":
    main()
