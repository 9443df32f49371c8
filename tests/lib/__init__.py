"""Models, backends, walkers and cases that tests share."""
