"""How a module is spread over the ranks of its side (contract C14): pure layout arithmetic, and what applies it."""
