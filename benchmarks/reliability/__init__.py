"""Does klrl keep its promises when disks, files and words are bad, and processes are killed?

``make faults fuzz soak kills``.
"""
