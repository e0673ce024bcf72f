"""What a strategy will take: profiles of a machine, balanced stages, and the search."""
