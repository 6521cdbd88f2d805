package main

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// party is somebody who sends, receives or both.
type party struct {
	*lab.Namespace
	name string // as the matrix prints it
	node string // the node that it is, or runs on; empty outside
	pod  bool
}

// servicePort is where every party's echo server listens.
const servicePort = 8080

// at is where a party's server is.
func (p party) at(family wire.Family) netip.AddrPort {
	return netip.AddrPortFrom(p.AddrOf(family), servicePort)
}

// ways in which one party can reach another, in the order of the marks in a cell.
var ways = [...]string{"ping", "TCP", "UDP"}

// meeting is the outcome for one ordered pair.
type meeting struct {
	family   wire.Family
	from, to party
	rtt      time.Duration
	seen     netip.Addr // the source that the other end saw, by TCP
	problems [len(ways)]error
}

// kind names what a pair stands for in the summary.
func (m meeting) kind() string {
	switch {
	case m.to.node == "" && m.from.pod:
		return "pod to outside"
	case m.to.node == "":
		return "host to outside"
	case !m.from.pod && !m.to.pod:
		return "host to host"
	case m.from.pod && m.to.pod && m.from.node == m.to.node:
		return "pod to pod, same node"
	case m.from.pod && m.to.pod:
		return "pod to pod, across nodes"
	}
	direction := "pod to host"
	if m.to.pod {
		direction = "host to pod"
	}
	if m.from.node == m.to.node {
		return direction + ", same node"
	}
	return direction + ", across nodes"
}

// meet has every sender reach every receiver of a family in every way, a few pairs at a time.
func (d *demo) meet(ctx context.Context, family wire.Family, from, to []party) []meeting {
	var all []meeting
	for _, f := range from {
		for _, t := range to {
			if f.Namespace != t.Namespace {
				all = append(all, meeting{family: family, from: f, to: t})
			}
		}
	}
	var running sync.WaitGroup
	slots := make(chan struct{}, 4)
	for i := range all {
		slots <- struct{}{}
		running.Go(func() {
			all[i].hold(ctx, d.expect(family, all[i].from, all[i].to))
			<-slots
		})
	}
	running.Wait()
	return all
}

// hold tries the three ways. Reaching somebody under another address than expected is a failure too.
func (m *meeting) hold(ctx context.Context, expected netip.Addr) {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	at := m.to.at(m.family)

	reply, err := m.from.Ping(ctx, at.Addr(), lab.PingOptions{})
	m.rtt, m.problems[0] = reply.RTT, err

	seen, err := m.from.TCP(ctx, at)
	m.seen, m.problems[1] = seen.Addr(), asExpected(m, seen.Addr(), expected, err)

	seen, err = m.from.UDP(ctx, at, 512)
	m.problems[2] = asExpected(m, seen.Addr(), expected, err)
}

func asExpected(m *meeting, seen, expected netip.Addr, err error) error {
	if err == nil && seen != expected {
		return fmt.Errorf("from %s to %s: the other end saw %s, want %s", m.from.name, m.to.name, seen, expected)
	}
	return err
}

const nameWidth, cellWidth = 9, 8

// drawMatrix draws one row per sender, one column per receiver and one mark per way, then what failed.
func (s *screen) drawMatrix(from, to []party, all []meeting) {
	cells := map[[2]string]meeting{}
	for _, m := range all {
		cells[[2]string{m.from.name, m.to.name}] = m
	}
	head := []string{pad("", nameWidth)}
	for _, receiver := range to {
		head = append(head, pad(receiver.name, cellWidth))
	}
	s.line("    %s", s.paint(dim, strings.TrimRight(strings.Join(head, ""), " ")))
	for _, sender := range from {
		row := []string{pad(sender.name, nameWidth)}
		for _, receiver := range to {
			m, met := cells[[2]string{sender.name, receiver.name}]
			row = append(row, s.cell(m, met), strings.Repeat(" ", cellWidth-len(ways)))
		}
		s.line("    %s", strings.TrimRight(strings.Join(row, ""), " "))
	}
	s.drawProblems(all)
}

// drawProblems counts what failed, and says why.
func (s *screen) drawProblems(all []meeting) {
	for _, m := range all {
		for _, problem := range m.problems {
			if problem != nil {
				s.failed++
				s.line("    %s", s.paint(red, problem.Error()))
			}
		}
	}
}

func (s *screen) cell(m meeting, met bool) string {
	if !met {
		return s.paint(dim, " · ")
	}
	var marks strings.Builder
	for _, problem := range m.problems {
		marks.WriteString(s.mark(problem == nil))
	}
	return marks.String()
}

// drawKinds sums the matrix up by what the pairs stand for.
func (s *screen) drawKinds(all []meeting) {
	var kinds []string
	byKind := map[string][]meeting{}
	for _, m := range all {
		if byKind[m.kind()] == nil {
			kinds = append(kinds, m.kind())
		}
		byKind[m.kind()] = append(byKind[m.kind()], m)
	}
	slices.Sort(kinds)
	for _, kind := range kinds {
		met := byKind[kind]
		row := []string{pad(kind, 28), pad(fmt.Sprintf("%d pairs", len(met)), 10)}
		for way, name := range ways {
			held := 0
			for _, m := range met {
				if m.problems[way] == nil {
					held++
				}
			}
			row = append(row, s.mark(held == len(met)), " ", pad(fmt.Sprintf("%s %d/%d", name, held, len(met)), 12))
		}
		s.line("    %s%s", strings.Join(row, ""), s.paint(dim, fmt.Sprintf("median ping %.2f ms", medianRTT(met).Seconds()*1000)))
	}
}

func medianRTT(all []meeting) time.Duration {
	var times []time.Duration
	for _, m := range all {
		if m.problems[0] == nil {
			times = append(times, m.rtt)
		}
	}
	if len(times) == 0 {
		return 0
	}
	slices.Sort(times)
	return times[len(times)/2]
}

func (d *demo) hostOf(p party) party {
	for _, host := range d.hosts {
		if host.node == p.node {
			return host
		}
	}
	return party{}
}
