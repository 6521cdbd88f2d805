package load

import (
	"encoding/json"
	"fmt"
	"math/bits"
	"time"
)

// A bucket is at most 1/128 as wide as what it counts: 0.8 %.
const (
	precision = 7
	half      = 1 << precision
	magnitude = 40 // the highest bit: 2^40 ns are 18 minutes
	buckets   = (magnitude - precision + 1) * half
)

// Histogram counts durations. Durations are rounded up by no more than 0.8 %, whatever their size; counting one allocates nothing.
// The zero value is ready. It is written to JSON as [upper bound in ns, count] for each bucket that is not empty.
type Histogram struct {
	counts [buckets]uint64
	total  uint64
	max    time.Duration
}

// Add counts one duration. More than 18 minutes count as that.
func (h *Histogram) Add(d time.Duration) {
	h.counts[bucket(uint64(max(d, 0)))]++
	h.total++
	h.max = max(h.max, d)
}

// Merge counts all that other has counted.
func (h *Histogram) Merge(other *Histogram) {
	for i, n := range other.counts {
		h.counts[i] += n
	}
	h.total += other.total
	h.max = max(h.max, other.max)
}

// Total is how many durations were counted.
func (h *Histogram) Total() uint64 { return h.total }

// Max is the longest, not rounded.
func (h *Histogram) Max() time.Duration { return h.max }

// Quantile is a duration that the share q of all, 0 to 1, did not exceed. It is 0 when there are none.
func (h *Histogram) Quantile(q float64) time.Duration {
	rank := uint64(q * float64(h.total))
	if float64(rank) < q*float64(h.total) || rank == 0 {
		rank++
	}
	var seen uint64
	for i, n := range h.counts {
		seen += n
		if n > 0 && seen >= rank {
			return min(upper(i), h.max)
		}
	}
	return h.max
}

// Bucket is a part of the histogram: Count durations of at most Upper, and longer than the bucket before.
type Bucket struct {
	Upper time.Duration
	Count uint64
}

// Buckets are those that are not empty, shortest first.
func (h *Histogram) Buckets() []Bucket {
	var filled []Bucket
	for i, n := range h.counts {
		if n > 0 {
			filled = append(filled, Bucket{Upper: min(upper(i), h.max), Count: n})
		}
	}
	return filled
}

// MarshalJSON writes the buckets that are not empty.
func (h *Histogram) MarshalJSON() ([]byte, error) {
	pairs := [][2]uint64{}
	for _, b := range h.Buckets() {
		pairs = append(pairs, [2]uint64{uint64(b.Upper), b.Count})
	}
	return json.Marshal(pairs)
}

// UnmarshalJSON reads what MarshalJSON wrote.
func (h *Histogram) UnmarshalJSON(data []byte) error {
	var pairs [][2]uint64
	if err := json.Unmarshal(data, &pairs); err != nil {
		return fmt.Errorf("histogram: want pairs of ns and count: %w", err)
	}
	*h = Histogram{}
	for _, p := range pairs {
		h.counts[bucket(p[0])] += p[1]
		h.total += p[1]
		h.max = max(h.max, time.Duration(p[0]))
	}
	return nil
}

// bucket is the index of a value's bucket. Values below 2*half have one each; above, each power of two has half of them.
func bucket(v uint64) int {
	v = min(v, 1<<magnitude-1)
	shift := max(bits.Len64(v)-precision-1, 0)
	return shift*half + int(v>>shift)
}

// upper is the largest value of a bucket.
func upper(i int) time.Duration {
	shift := max(i/half-1, 0)
	return time.Duration((uint64(i-shift*half)+1)<<shift - 1)
}
