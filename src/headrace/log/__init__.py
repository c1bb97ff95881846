"""The commit log: durable records of a topic, behind one interface (`store.py`)."""
