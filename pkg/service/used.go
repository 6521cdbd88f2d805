package service

// Used is how much of each map is not free: what is in use, and what has been given up a moment ago.
func (s *State) Used() Capacities {
	return Capacities{
		Services: uint32(len(s.services.have) + s.room.leaving),
		Ranges:   uint32(len(s.ranges.have) + s.room.leavingRanges),
		Sets:     uint32(max(len(s.bySet)-1-len(s.room.sets), 0)),
		Backends: uint32(max(len(s.backends.have)-1-len(s.room.backends), 0)),
		Slots:    uint32(len(s.slots.have) - s.room.slots.left()),
	}
}

// left is how many slots are free.
func (b *buddies) left() (n int) {
	for order, count := range b.count {
		n += count << order
	}
	return n
}
