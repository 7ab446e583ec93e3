"""Text chunks to what clients read: whole bodies, and the events of streams. Pure: no network, no clock."""
