"""Pipeline stages: schedules, and the program that runs them."""
