"""`python -m kog_triton.bench`."""

from kog_triton.bench import main
from kog_triton.cli.command import end_process

end_process(main)
