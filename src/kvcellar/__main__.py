"""python -m kvcellar"""

from kvcellar.cli import main

main()
