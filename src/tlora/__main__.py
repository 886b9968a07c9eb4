"""`python -m tlora` is `tlora`."""

from tlora.cli import main

if __name__ == "__main__":
    main()
