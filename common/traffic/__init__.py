"""Real traffic: traces of arrivals with their lengths, and open-loop replay of them against a server."""
