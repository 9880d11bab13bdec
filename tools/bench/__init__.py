"""What the engine gains, by the token and by the pilot; recorded results lie beside."""
