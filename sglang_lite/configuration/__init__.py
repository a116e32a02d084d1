"""How options are declared, read from the command line, the environment and a YAML file, and reported."""
