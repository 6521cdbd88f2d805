package service

import "math/bits"

// extent is a piece of the map slots: 1<<order slots, beginning at a multiple of that.
type extent struct {
	first uint32
	order int8 // -1: none
}

var noExtent = extent{order: -1}

// orderFor is the order of the smallest extent that n slots fit into.
func orderFor(n int) int8 {
	if n == 0 {
		return -1
	}
	return int8(bits.Len(uint(n - 1)))
}

// buddies hands extents out and takes them back: a buddy allocator, which gives the lowest free extent of the order asked for
// and joins halves that are both free. Thus it wastes at most half of an extent, and sets of one size replace each other.
type buddies struct {
	free  [maxOrder + 1][]uint64 // by order: a bit for each extent
	count [maxOrder + 1]int
}

// maxOrder is that of the largest map, of as many slots as a block can name.
const maxOrder = 24

func newBuddies(slots uint32) *buddies {
	b := &buddies{}
	for order := range b.free {
		b.free[order] = make([]uint64, (slots>>order+63)/64)
	}
	for first := uint32(0); first < slots; {
		order := bits.TrailingZeros32(first | 1<<maxOrder)
		for first+1<<order > slots {
			order--
		}
		b.put(extent{first, int8(order)})
		first += 1 << order
	}
	return b
}

// take gives an extent of that order; none when there is no room.
func (b *buddies) take(order int8) (extent, bool) {
	if order < 0 {
		return noExtent, true
	}
	for o := order; o <= maxOrder; o++ {
		if b.count[o] > 0 {
			return b.split(extent{b.lowest(o), o}, order), true
		}
	}
	return noExtent, false
}

// split takes a free extent and gives back all of it but its lowest part of that order.
func (b *buddies) split(e extent, order int8) extent {
	b.clear(e)
	for e.order > order {
		e.order--
		b.set(extent{e.first + 1<<e.order, e.order})
	}
	return e
}

// reserve takes a certain extent; false when a part of it is not free.
func (b *buddies) reserve(e extent) bool {
	if e.order < 0 {
		return true
	}
	if e.first&(1<<e.order-1) != 0 {
		return false
	}
	for o := e.order; o <= maxOrder; o++ {
		around := extent{e.first &^ (1<<o - 1), o}
		if !b.has(around) {
			continue
		}
		b.clear(around)
		for around.order > e.order {
			around.order--
			upper := extent{around.first + 1<<around.order, around.order}
			if e.first >= upper.first {
				upper, around = around, upper
			}
			b.set(upper)
		}
		return true
	}
	return false
}

// put takes an extent back.
func (b *buddies) put(e extent) {
	if e.order < 0 {
		return
	}
	for e.order < maxOrder {
		buddy := extent{e.first ^ 1<<e.order, e.order}
		if !b.has(buddy) {
			break
		}
		b.clear(buddy)
		e = extent{min(e.first, buddy.first), e.order + 1}
	}
	b.set(e)
}

func (b *buddies) lowest(order int8) uint32 {
	for i, word := range b.free[order] {
		if word != 0 {
			return uint32(i*64+bits.TrailingZeros64(word)) << order
		}
	}
	panic("an extent is counted that is not there")
}

func (b *buddies) has(e extent) bool {
	at := e.first >> e.order
	return int(at/64) < len(b.free[e.order]) && b.free[e.order][at/64]&(1<<(at%64)) != 0
}

func (b *buddies) set(e extent) {
	at := e.first >> e.order
	b.free[e.order][at/64] |= 1 << (at % 64)
	b.count[e.order]++
}

func (b *buddies) clear(e extent) {
	at := e.first >> e.order
	b.free[e.order][at/64] &^= 1 << (at % 64)
	b.count[e.order]--
}

// fit says whether extents of all these orders could be taken.
func (b *buddies) fit(orders []int8) bool {
	var taken []extent
	defer func() {
		for _, e := range taken {
			b.put(e)
		}
	}()
	for _, order := range orders {
		e, ok := b.take(order)
		if !ok {
			return false
		}
		taken = append(taken, e)
	}
	return true
}
