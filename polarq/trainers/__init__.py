"""What trainers are served from: rows, one per trace, and the advantages of a group's rollouts."""
