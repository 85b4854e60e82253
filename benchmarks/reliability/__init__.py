"""Does klrl keep its promises when disks, files and words are bad? ``make faults fuzz soak``."""
