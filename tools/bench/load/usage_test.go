package load

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestParseStat(t *testing.T) {
	const text = "cpu  100 2 300 4000 50 6 70 8 9 10\ncpu0 60 1 200 2000 30 3 40 5 9 0\ncpu1 40 1 100 2000 20 3 30 3 0 10\nintr 123 0 0\nctxt 5\n"
	cpus, err := parseStat(text)
	if err != nil {
		t.Fatal(err)
	}
	want := []cpu{{kernel: 243 * tick, softIRQ: 43 * tick, stolen: 5 * tick}, {kernel: 133 * tick, softIRQ: 33 * tick, stolen: 3 * tick}}
	if diff := cmp.Diff(want, cpus, cmp.AllowUnexported(cpu{})); diff != "" {
		t.Error(diff)
	}
	for name, text := range map[string]string{
		"nothing":         "",
		"no CPU":          "cpu  1 2 3 4 5 6 7 8\nintr 1\n",
		"too few":         "cpu0 1 2 3 4 5 6 7\n",
		"no number":       "cpu0 1 2 3 x 5 6 7 8\n",
		"cut in a number": "cpu0 1 2 3 4 5 6 7 8\ncpu1 1 2",
	} {
		if cpus, err := parseStat(text); err == nil {
			t.Errorf("%s: parsed as %v", name, cpus)
		}
	}
}

func TestParseDelay(t *testing.T) {
	if d, err := parseDelay("1000 2000 3\n"); err != nil || d != 2000 {
		t.Errorf("got %s, %v; want 2000 ns", d, err)
	}
	for _, text := range []string{"", "1 2", "1 x 3"} {
		if d, err := parseDelay(text); err == nil {
			t.Errorf("%q was parsed as %s", text, d)
		}
	}
}

// What the kernel's files do not say is no usage.
func TestBrokenUsageIsRefused(t *testing.T) {
	var e end
	if u := usage(&e, &e, &e); u.check(Target{}) == nil {
		t.Error("nothing was read, and nothing is wrong")
	}
}

func TestRefused(t *testing.T) {
	two := Target{ServerCPU: 1}
	quiet := Usage{Window: time.Second}
	delayed := Usage{Window: time.Second, Server: Process{Delayed: 60 * time.Millisecond}}
	late := Usage{Window: time.Second, Server: Process{Delayed: 40 * time.Millisecond}}
	stolen := Usage{Window: time.Second, Stolen: []time.Duration{0, 40 * time.Millisecond}}
	aTick := Usage{Window: time.Second, Stolen: []time.Duration{0, 30 * time.Millisecond}}
	for _, c := range []struct {
		name   string
		target Target
		result Result
		want   string // part of the error
	}{
		{"good", two, Result{Sent: 10, Counted: 8, Usage: quiet}, ""},
		{"one in a thousand lost", two, Result{Sent: 2000, Lost: 2, Counted: 5, Usage: quiet}, ""},
		{"more than that lost", two, Result{Sent: 2000, Lost: 3, Counted: 5, Usage: quiet}, "3 of 2000 were lost or sent again"},
		{"nothing came", two, Result{Sent: 10, Lost: 10, Usage: quiet}, "nothing of 10 was counted"},
		{"starved", two, Result{Sent: 10, Counted: 8, Usage: delayed}, "server waited 60ms of 1s for CPU 1"},
		{"a little late", two, Result{Sent: 10, Counted: 8, Usage: late}, ""},
		{"stolen", two, Result{Sent: 10, Counted: 8, Usage: stolen}, "took CPU 1 away for 40ms of 1s"},
		{"little stolen", two, Result{Sent: 10, Counted: 8, Usage: aTick}, ""},
		{"stolen elsewhere", Target{}, Result{Sent: 10, Counted: 8, Usage: stolen}, ""},
		{"one CPU for both", Target{}, Result{Sent: 10, Counted: 8, Usage: delayed}, ""},
	} {
		err := c.result.check(c.target)
		if c.want == "" && err != nil || c.want != "" && (!errors.Is(err, ErrNotMeasured) || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: got %v, want %q", c.name, err, c.want)
		}
		if starved := c.name == "starved" || c.name == "stolen"; errors.Is(err, ErrStarved) != starved {
			t.Errorf("%s: ErrStarved is %t", c.name, !starved)
		}
	}
}

func TestTargetCheck(t *testing.T) {
	if (Target{}).check() == nil {
		t.Error("nothing is a target")
	}
	if _, err := UDP(t.Context(), Target{}, 5); err == nil || !strings.Contains(err.Error(), "5 bytes") {
		t.Errorf("datagrams as short as a hello: %v", err)
	}
}

func TestParseSNMP(t *testing.T) {
	const text = "Ip: Forwarding DefaultTTL\nIp: 1 64\nTcp: MaxConn RetransSegs InErrs\nTcp: -1 77 0\nUdp: InDatagrams\n"
	if n, err := parseSNMP(text, "Tcp:", "RetransSegs"); err != nil || n != 77 {
		t.Errorf("got %d, %v; want 77", n, err)
	}
	for _, c := range [][2]string{{"Tcp:", "MaxConn"}, {"Tcp:", "Nothing"}, {"Udp:", "InDatagrams"}, {"Icmp:", "InMsgs"}} {
		if n, err := parseSNMP(text, c[0], c[1]); err == nil {
			t.Errorf("%s %s is %d, which is not to be read", c[0], c[1], n)
		}
	}
}

// The sender's side of pacing: what does not arrive is taken for lost after a while, and what was taken for lost may still arrive.
func TestPace(t *testing.T) {
	e := &newSample(Target{}).client
	for _, step := range []struct {
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
	} {
		e.total, e.lost = step.sent, step.lost
		e.received.Store(step.received)
		if room := e.room(); room != step.room || e.lost != step.lostThen {
			t.Errorf("%s: room is %t with %d lost, want %t with %d", step.name, room, e.lost, step.room, step.lostThen)
		}
	}
}
