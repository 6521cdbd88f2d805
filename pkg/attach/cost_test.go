package attach

import (
	"testing"
	"time"
)

// TestAskingForALink fails when more is asked for than the link: the agent asks for every pod's more than once a second.
func TestAskingForALink(t *testing.T) {
	d := newDevice(t, TCX)
	d.attach(FromPod, hookProgram(t, FromPod, 1))
	const few = 5 // a path, as Go and as C write it
	allocations := testing.AllocsPerRun(100, func() {
		if s, err := d.Attached(d.index, FromPod); err != nil || s.Mode != TCX {
			t.Fatal(s, err)
		}
	})
	if allocations > few {
		t.Errorf("%v allocations", allocations)
	}
}

// TestSecondProgramOfAPod fails when an ADD would wait for the kernel's grace periods once more: its second program is a filter.
func TestSecondProgramOfAPod(t *testing.T) {
	d := newDevice(t, TCX)
	first, second := hookProgram(t, FromPod, 1), hookProgram(t, ToPod, 2)
	const tries = 5
	link, filter := time.Hour, time.Hour // the least that either takes
	d.New = true
	for range tries {
		began := time.Now()
		d.Mode = TCX
		d.attach(FromPod, first)
		link = min(link, time.Since(began))
		began = time.Now()
		d.Mode = Auto
		d.attach(ToPod, second)
		filter = min(filter, time.Since(began))
		d.remove()
		d.create()
	}
	if filter > link/2 {
		t.Errorf("the second program takes %v, the first %v", filter, link)
	}
}
