"""The job `report`: an HTML page about log and lake."""
