"""What `kog profile` does with a recording: analysis (numpy alone), trace, show, picture."""
