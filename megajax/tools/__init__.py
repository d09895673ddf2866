"""Commands about runs and configs; the trainer imports none of them."""
