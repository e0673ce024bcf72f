"""The forms a plan takes: tasks, the Global Training DAG, and the rank program; each with a text form and a check."""
