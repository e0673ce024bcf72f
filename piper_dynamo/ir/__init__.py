"""The forms a plan takes: tasks, the Global Training DAG, the rank program."""
