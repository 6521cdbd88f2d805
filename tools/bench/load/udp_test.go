package load

import "testing"

// The sender's side of pacing: what does not arrive is taken for lost after a while, and what was taken for lost may still arrive.
func TestPace(t *testing.T) {
	m, err := newMeter()
	if err != nil {
		t.Skipf("this kernel does not say how long a thread waits: %v", err)
	}
	s := &sender{end: &end{meter: m, order: &order{}, shared: new(shared)}}
	steps := []struct {
		name                 string
		sent, received, lost uint64 // lost: before
		room                 bool
		lostThen             uint64
	}{
		{"nothing sent", 0, 0, 0, true, 0},
		{"room for one more batch", udpWindow - udpBatch, 0, 0, true, 0},
		{"full, and nothing moves", udpWindow, 0, 0, false, udpWindow},
		{"all lost", udpWindow, 0, udpWindow, true, udpWindow},
		{"what was lost arrives", udpWindow, 100, udpWindow, true, udpWindow},
		{"full beside what was lost", 3 * udpWindow, udpWindow, udpWindow, false, 2 * udpWindow},
		{"all arrived", 3 * udpWindow, 3 * udpWindow, 0, true, 0},
	}
	for _, step := range steps {
		s.sent, s.lost = step.sent, step.lost
		s.shared.received.Store(step.received)
		if room := s.room(); room != step.room || s.lost != step.lostThen {
			t.Errorf("%s: room is %t with %d lost, want %t with %d", step.name, room, s.lost, step.room, step.lostThen)
		}
	}
	if s.paused != 0 {
		t.Errorf("paused for %s outside of the window", s.paused)
	}
	s.phase = measuring
	s.sent = s.shared.received.Load() + udpWindow
	if s.room() || s.paused < udpGiveUp {
		t.Errorf("paused for %s inside the window, want %s or more", s.paused, udpGiveUp)
	}
}
