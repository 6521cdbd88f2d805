package attach

import "testing"

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
