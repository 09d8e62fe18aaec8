"""Rows on their way into the model: sources, one seeded order, samples, and the images of each."""
