"""`python -m server MODEL`: serve a model until SIGTERM."""

import sys

from server.run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
