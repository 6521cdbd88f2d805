package load

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

const (
	statBefore = `cpu  100 2 300 4000 50 6 70 8 9 10
cpu0 60 1 200 2000 30 3 40 5 9 0
cpu1 40 1 100 2000 20 3 30 3 0 10
intr 123 0 0
ctxt 5
`
	statAfter = `cpu  110 2 320 4030 50 6 90 9 9 10
cpu0 61 1 218 2000 30 4 55 6 9 0
cpu1 49 1 102 2030 20 3 35 3 0 10
intr 123 0 0
`
)

func TestParseStat(t *testing.T) {
	before, err := parseStat(statBefore)
	if err != nil {
		t.Fatal(err)
	}
	ms := time.Millisecond
	want := []CPU{
		{User: 600 * ms, Nice: 10 * ms, System: 2000 * ms, Idle: 20300 * ms, IRQ: 30 * ms, SoftIRQ: 400 * ms, Steal: 50 * ms},
		{User: 400 * ms, Nice: 10 * ms, System: 1000 * ms, Idle: 20200 * ms, IRQ: 30 * ms, SoftIRQ: 300 * ms, Steal: 30 * ms},
	}
	if diff := cmp.Diff(want, before); diff != "" {
		t.Error(diff)
	}
	after, err := parseStat(statAfter)
	if err != nil {
		t.Fatal(err)
	}
	spent, err := elapsed(before, after)
	if err != nil {
		t.Fatal(err)
	}
	sum := Usage{CPUs: spent}.Machine()
	if want := (CPU{User: 100 * ms, System: 200 * ms, IRQ: 10 * ms, SoftIRQ: 200 * ms, Steal: 10 * ms, Idle: 300 * ms}); sum != want {
		t.Errorf("the machine spent %+v, want %+v", sum, want)
	}
	if busy := sum.Busy(); busy != 510*ms {
		t.Errorf("busy for %s, want 510ms", busy)
	}
}

func TestParseStatOffline(t *testing.T) {
	cpus, err := parseStat("cpu  1 1 1 1 1 1 1 1\ncpu0 1 0 0 0 0 0 0 0 0 0\ncpu3 2 0 0 0 0 0 0 0 0 0\n")
	if err != nil {
		t.Fatal(err)
	}
	want := []CPU{{User: tick}, {}, {}, {User: 2 * tick}}
	if diff := cmp.Diff(want, cpus); diff != "" {
		t.Error(diff)
	}
}

func TestParseStatRefuses(t *testing.T) {
	for name, text := range map[string]string{
		"nothing":          "",
		"no CPU":           "cpu  1 2 3 4 5 6 7 8\nintr 1\n",
		"too few":          "cpu0 1 2 3 4 5 6 7\n",
		"no number":        "cpu0 1 2 3 x 5 6 7 8\n",
		"cut in a number":  "cpu0 1 2 3 4 5 6 7 8\ncpu1 1 2",
		"CPU of no number": "cpux 1 2 3 4 5 6 7 8\n",
		"huge CPU":         "cpu4294967296 1 2 3 4 5 6 7 8\n",
	} {
		if cpus, err := parseStat(text); err == nil {
			t.Errorf("%s: parsed as %v", name, cpus)
		}
	}
	if _, err := elapsed(make([]CPU, 2), make([]CPU, 1)); err == nil {
		t.Error("a CPU that went away was not noticed")
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

func TestRefused(t *testing.T) {
	two := Target{ServerCPU: 1}
	quiet := Usage{Window: time.Second}
	delayed := Usage{Window: time.Second, Server: Process{Delayed: 60 * time.Millisecond}}
	late := Usage{Window: time.Second, Server: Process{Delayed: 40 * time.Millisecond}}
	stolen := Usage{Window: time.Second, CPUs: []CPU{{}, {Steal: 40 * time.Millisecond}}}
	aTick := Usage{Window: time.Second, CPUs: []CPU{{}, {Steal: 30 * time.Millisecond}}}
	for _, c := range []struct {
		name   string
		target Target
		result UDPResult
		want   string // part of the error
	}{
		{"good", two, UDPResult{Sent: 10, Received: 10, Packets: 8, Usage: quiet}, ""},
		{"one in a thousand lost", two, UDPResult{Sent: 2000, Received: 1998, Lost: 2, Packets: 5, Usage: quiet}, ""},
		{"more than that lost", two, UDPResult{Sent: 2000, Received: 1997, Lost: 3, Packets: 5, Usage: quiet}, "3 of 2000 datagrams were lost"},
		{"nothing came", two, UDPResult{Sent: 10, Lost: 10, Usage: quiet}, "saw nothing"},
		{"more came than was sent", two, UDPResult{Sent: 10, Received: 11, Packets: 11, Usage: quiet}, "10 datagrams were sent and 11"},
		{"receiver too slow", two, UDPResult{Sent: 1000, Received: 990, Overflow: 10, Packets: 990, Usage: quiet}, "no room for 10"},
		{"starved", two, UDPResult{Sent: 10, Received: 10, Packets: 8, Usage: delayed}, "server waited 60ms of 1s for CPU 1"},
		{"a little late", two, UDPResult{Sent: 10, Received: 10, Packets: 8, Usage: late}, ""},
		{"stolen", two, UDPResult{Sent: 10, Received: 10, Packets: 8, Usage: stolen}, "took CPU 1 away for 40ms of 1s"},
		{"little stolen", two, UDPResult{Sent: 10, Received: 10, Packets: 8, Usage: aTick}, ""},
		{"stolen elsewhere", Target{}, UDPResult{Sent: 10, Received: 10, Packets: 8, Usage: stolen}, ""},
		{"one CPU for both", Target{}, UDPResult{Sent: 10, Received: 10, Packets: 8, Usage: delayed}, ""},
	} {
		err := c.result.check(c.target)
		switch {
		case c.want == "" && err != nil:
			t.Errorf("%s: %v", c.name, err)
		case c.want != "" && (!errors.Is(err, ErrNotMeasured) || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%s: got %v, want %q", c.name, err, c.want)
		}
		if starved := c.name == "starved" || c.name == "stolen"; errors.Is(err, ErrStarved) != starved {
			t.Errorf("%s: ErrStarved is %t", c.name, !starved)
		}
	}
}

func TestTargetCheck(t *testing.T) {
	for name, target := range map[string]Target{
		"empty":             {},
		"no address":        {Client: "a", Server: "b", Duration: time.Second},
		"negative CPU":      {Client: "a", Server: "b", ClientCPU: -1, Duration: time.Second},
		"negative duration": {Client: "a", Server: "b", Duration: -time.Second},
	} {
		if target.check() == nil {
			t.Errorf("%s: not refused", name)
		}
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
