"""The engine: records what one step computes, drops what it is told to, and makes it again for backward."""
