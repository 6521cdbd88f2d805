package load

import (
	"encoding/json"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestBuckets(t *testing.T) {
	// Every value lies in its bucket, whose bounds are never further apart than promised, and buckets follow each other without a gap.
	for i := range buckets {
		high := uint64(upper(i))
		low := uint64(0)
		if i > 0 {
			low = uint64(upper(i-1)) + 1
		}
		if bucket(low) != i || bucket(high) != i {
			t.Fatalf("bucket %d is from %d to %d, which are in %d and %d", i, low, high, bucket(low), bucket(high))
		}
		if high-low > low/half {
			t.Fatalf("bucket %d from %d to %d is wider than 1/%d", i, low, high, half)
		}
	}
	if last := uint64(upper(buckets - 1)); last != 1<<magnitude-1 {
		t.Errorf("the last bucket ends at %d, want %d", last, uint64(1)<<magnitude-1)
	}
}

func TestQuantile(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	var h Histogram
	var all []time.Duration
	for range 100_000 {
		d := time.Duration(random.ExpFloat64() * float64(20*time.Microsecond))
		all = append(all, d)
		h.Add(d)
	}
	slices.Sort(all)
	for _, q := range []float64{0, 0.001, 0.5, 0.9, 0.99, 0.999, 1} {
		exact := all[max(int(q*float64(len(all)))-1, 0)]
		got := h.Quantile(q)
		if got < exact || got > exact+exact/half+1 {
			t.Errorf("quantile %g is %s, want %s and no more than 0.8 %% above", q, got, exact)
		}
	}
	if h.Max() != all[len(all)-1] || h.Quantile(1) != h.Max() {
		t.Errorf("max %s, quantile 1 %s, want %s", h.Max(), h.Quantile(1), all[len(all)-1])
	}
}

func TestQuantileOfFew(t *testing.T) {
	var h Histogram
	if got := h.Quantile(0.5); got != 0 {
		t.Errorf("an empty histogram has a median of %s", got)
	}
	h.Add(100)
	h.Add(200)
	h.Add(-5) // a clock that went back
	want := map[float64]time.Duration{0: 0, 0.33: 0, 0.5: 100, 0.66: 100, 0.67: 200, 1: 200}
	for q, d := range want {
		if got := h.Quantile(q); got != d {
			t.Errorf("quantile %g of 0, 100, 200 is %d, want %d", q, got, d)
		}
	}
}

func TestLongest(t *testing.T) {
	var h Histogram
	h.Add(10 * time.Hour)
	if h.Max() != 10*time.Hour || h.Quantile(0.5) != upper(buckets-1) {
		t.Errorf("max %s, median %s; want 10h and the last bucket", h.Max(), h.Quantile(0.5))
	}
}

func TestHistogramJSON(t *testing.T) {
	var h, back Histogram
	for _, d := range []time.Duration{3, 3, 1000, 12345678} {
		h.Add(d)
	}
	text, err := json.Marshal(&h)
	if err != nil {
		t.Fatal(err)
	}
	if want := `[[3,2],[1003,1],[12345678,1]]`; string(text) != want {
		t.Errorf("got %s, want %s", text, want)
	}
	if err := json.Unmarshal(text, &back); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(h.Buckets(), back.Buckets()); diff != "" || back.Total() != 4 || back.Max() != 12345678 {
		t.Errorf("read back: total %d max %d %s", back.Total(), back.Max(), diff)
	}
	if err := json.Unmarshal([]byte(`{"a":1}`), &back); err == nil {
		t.Error("an object is no histogram")
	}
}

func TestMerge(t *testing.T) {
	var a, b, both Histogram
	for i := range time.Duration(1000) {
		a.Add(i * 7)
		b.Add(i * 11)
		both.Add(i * 7)
		both.Add(i * 11)
	}
	a.Merge(&b)
	if a != both {
		t.Error("two histograms together are not the histogram of both")
	}
}

func TestAddAllocatesNothing(t *testing.T) {
	var h Histogram
	if n := testing.AllocsPerRun(100, func() { h.Add(1234) }); n != 0 {
		t.Errorf("Add allocates %g times", n)
	}
}
