"""SSH against real sshds on loopback, as whoever runs the tests: each with its own host key, options and home."""
