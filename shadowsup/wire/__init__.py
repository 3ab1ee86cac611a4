"""Messages that cross process boundaries, and their framing. Imports msgspec and the standard library only."""
