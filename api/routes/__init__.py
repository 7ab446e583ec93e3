"""The routes, a file per group. A route reads its request, asks `Services`, and answers."""
