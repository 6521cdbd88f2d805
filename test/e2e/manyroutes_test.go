package e2e

import (
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// foreignRoute is one of very many routes of a routing daemon's.
func foreignRoute(number, uplink int, gateway net.IP) *netlink.Route {
	dst := net.IPv4(byte(20+number>>16), byte(number>>8), byte(number), 0).To4()
	return &netlink.Route{Dst: &net.IPNet{IP: dst, Mask: net.CIDRMask(24, 32)}, LinkIndex: uplink, Gw: gateway, Protocol: 186}
}

// addRoutes adds all of them, many with each system call.
func addRoutes(t *testing.T, node *lab.Node, number, uplink int, gateway net.IP) {
	t.Helper()
	must(t, node.Do(func() error {
		fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		const most = 500
		var batch []byte
		for i := range number {
			r := foreignRoute(i, uplink, gateway)
			request := nl.NewNetlinkRequest(unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_EXCL)
			head := nl.NewRtMsg()
			head.Family, head.Dst_len, head.Protocol = unix.AF_INET, 24, uint8(r.Protocol)
			request.AddData(head)
			request.AddData(nl.NewRtAttr(unix.RTA_DST, r.Dst.IP))
			request.AddData(nl.NewRtAttr(unix.RTA_GATEWAY, r.Gw.To4()))
			request.AddData(nl.NewRtAttr(unix.RTA_OIF, nl.Uint32Attr(uint32(uplink))))
			batch = append(batch, request.Serialize()...) //nolint:misspell // the library's spelling
			if i%most == most-1 || i == number-1 {
				if err := unix.Sendto(fd, batch, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
					return err
				}
				batch = batch[:0]
			}
		}
		return nil
	}))
}

// TestVeryManyRoutes gives a node the routes of a routing daemon, and changes them a thousand times a second: that costs the agent
// neither memory nor much of a processor, and what is ours comes back. With priv.Long there are as many as the Internet has.
func TestVeryManyRoutes(t *testing.T) {
	const mebibyte = 1 << 20
	number, period, most, back, processor := 30_000, 3*time.Second, 25*mebibyte, 5*time.Second, 0.25 // so short a time is noisy
	if priv.Long() {
		number, period, most, back, processor = 1_000_000, 75*time.Second, 90*mebibyte, 10*time.Second, 0.1
	}
	d := startDamaged(t, []string{"--log-level=debug"})
	uplink, gateway := d.uplink(t), net.IP(d.Nodes[1].Addr().AsSlice())
	_, before := resident(t, d.node.AgentPID()) // at its start, which loads programs
	began := time.Now()
	addRoutes(t, d.node, number, uplink, gateway)
	added := time.Since(began)
	time.Sleep(5 * time.Second) // the agent has read them all, perhaps more than once
	loaded, _ := resident(t, d.node.AgentPID())

	d.removeRouteOfPods(t, priv.Patience(back))
	began = time.Now()
	pod := addPod(t, d.node, "late")
	took := time.Since(began)

	for seen := -1; seen != d.eventPasses(t); time.Sleep(time.Second) { // those for the pod
		seen = d.eventPasses(t)
	}
	cost, passes := cpuTime(t, d.node.AgentPID()), d.eventPasses(t)
	began = time.Now()
	changes := changeRoutes(t, d.node, number, uplink, gateway, period)
	share := float64(cpuTime(t, d.node.AgentPID())-cost) / float64(time.Since(began))
	passes = d.eventPasses(t) - passes
	now, peak := resident(t, d.node.AgentPID())
	t.Logf("%d routes added in %v: %d MiB before, %d after, %d after %d changes, %d at most; %.1f %% of a processor, %d passes; an ADD took %v", number, added, before/mebibyte, loaded/mebibyte, now/mebibyte, changes,
		peak/mebibyte, 100*share, passes, took)
	if peak-before > most {
		t.Errorf("%d MiB more than before at most, want %d", (peak-before)/mebibyte, most/mebibyte)
	}
	if share > processor {
		t.Errorf("%.1f %% of a processor", 100*share)
	}
	d.removeRouteOfPods(t, priv.Patience(back))
	if err := d.node.DelPod(t.Context(), pod); err != nil {
		t.Error(err)
	}
	eventually(t, 3*answerLimit, "no problems", func() bool {
		_, err := d.node.Ebpfctl(t.Context(), "status")
		return err == nil
	})
}

// removeRouteOfPods deletes the route to another node's pods and waits until it is back.
func (d *damaged) removeRouteOfPods(t *testing.T, within time.Duration) {
	t.Helper()
	far := d.Nodes[1].PodCIDR()
	dst := &net.IPNet{IP: far.Addr().AsSlice(), Mask: net.CIDRMask(far.Bits(), 32)}
	must(t, d.node.Netlink().RouteDel(&netlink.Route{Dst: dst}))
	for began := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		found, err := d.node.Netlink().RouteGetWithOptions(far.Addr().Next().AsSlice(), &netlink.RouteGetOptions{FIBMatch: true})
		if err == nil && len(found) == 1 && found[0].Dst != nil && found[0].Dst.String() == dst.String() {
			return
		}
		if time.Since(began) > within {
			t.Fatalf("the route to %s is not back: %v, %v", far, found, err)
		}
	}
}

// changeRoutes deletes and adds the routes in turn, a thousand times a second.
func changeRoutes(t *testing.T, node *lab.Node, number, uplink int, gateway net.IP, period time.Duration) (changes int) {
	t.Helper()
	for began := time.Now(); time.Since(began) < period; time.Sleep(5 * time.Millisecond) {
		for due := int(time.Since(began).Milliseconds()); changes < due; changes += 2 {
			r := foreignRoute(changes*7919%number, uplink, gateway)
			must(t, node.Netlink().RouteDel(r))
			must(t, node.Netlink().RouteAdd(r))
		}
	}
	return changes
}

// resident is how much memory a process has and has had at most, in bytes.
func resident(t *testing.T, pid int) (now, peak int) {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	must(t, err)
	for line := range strings.Lines(string(status)) {
		fields := strings.Fields(line)
		switch fields[0] {
		case "VmRSS:":
			now, err = strconv.Atoi(fields[1])
		case "VmHWM:":
			peak, err = strconv.Atoi(fields[1])
		}
		must(t, err)
	}
	return now * 1024, peak * 1024
}
