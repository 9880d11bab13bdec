"""Benchmarks of the engine, by the token and by the pilot; recorded results lie beside."""
