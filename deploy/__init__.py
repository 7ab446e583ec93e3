"""The command line, the supervisor, the embedded server and the model store; starts the other roles."""
