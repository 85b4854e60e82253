"""Does klrl keep its promises when words and files are bad, and processes are killed?

``make fuzz soak kills``.
"""
