"""`/v1/batches`: states and validation for the api, and the driver that expands files and collects answers."""
