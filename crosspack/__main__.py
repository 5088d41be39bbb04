"""``python -m crosspack`` is the console command ``crosspack``."""

from crosspack.cli import main

if __name__ == "__main__":
    main()
