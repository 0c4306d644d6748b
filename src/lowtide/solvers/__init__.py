"""Solvers: one method a file. None is trusted: ``simulate`` judges what each of them proposes."""
