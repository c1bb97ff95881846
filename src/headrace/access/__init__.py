"""Access control without effects: operations, grants, principals and tokens. Bytes and time are arguments."""
