package measure

import (
	"archive/tar"
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"golang.org/x/sys/unix"
)

// loopback is a host of flows that need no cluster.
var loopback = host{func(f func() error) error { return f() }, netip.MustParseAddr("127.0.0.1")}

// lossy forwards datagrams to another address but every tenth, and each of them twice.
func lossy(t *testing.T, to net.Addr) net.Addr {
	t.Helper()
	in, err := loopback.listen()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { in.Close() })
	out, err := net.Dial("udp4", to.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { out.Close() })
	go func() {
		buffer := make([]byte, 64)
		for {
			n, _, err := in.ReadFrom(buffer)
			if err != nil {
				return
			}
			if buffer[n-1]%10 == 0 {
				continue
			}
			for range 2 {
				_, _ = out.Write(buffer[:n])
			}
		}
	}()
	return in.LocalAddr()
}

// What is lost on the way is counted, whatever comes twice.
func TestFlow(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to enlarge a socket's buffer")
	}
	target, err := loopback.listen()
	if err != nil {
		t.Fatal(err)
	}
	source, err := loopback.dial(lossy(t, target.LocalAddr()))
	if err != nil {
		t.Fatal(err)
	}
	defer source.Close()
	var f flow
	received := make(chan error, 1)
	go func() { received <- f.receive(target, nil) }()
	started := time.Now()
	ctx, stop := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer stop()
	if err := f.send(ctx, source); err != nil {
		t.Fatal(err)
	}
	took := time.Since(started)
	time.Sleep(drain)
	target.Close()
	if err := <-received; err != nil {
		t.Fatal(err)
	}
	sent, want := f.sent.Load(), int64(0)
	for number := range sent {
		if number%256%10 == 0 {
			want++
		}
	}
	if lost := f.lost(); lost != want || want == 0 {
		t.Errorf("%d of %d are counted as lost, %d are", lost, sent, want)
	}
	// A busy machine lets the sender wait, and at the end it may owe some.
	if most := int64(took * rate / time.Second); sent < 100 || sent > most {
		t.Errorf("%d datagrams were sent in %s at %d a second", sent, took, rate)
	}
}

func TestLongestGap(t *testing.T) {
	var f flow
	began := time.Now()
	for number, ms := range []int{0, 3, 12, 13} {
		f.note(uint64(number), began.Add(time.Duration(ms)*time.Millisecond))
	}
	f.note(2, began.Add(time.Second)) // has been there before
	if gap := f.longestGap(); gap != 9*time.Millisecond {
		t.Errorf("the longest gap is %s, want 9 ms", gap)
	}
}

// An echo's flow has numbers of its own, so that what is lost on the way there is not lost once more on the way back.
func TestEcho(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to enlarge a socket's buffer")
	}
	target, err := loopback.listen()
	if err != nil {
		t.Fatal(err)
	}
	source, err := loopback.dial(target.LocalAddr())
	if err != nil {
		t.Fatal(err)
	}
	var p path
	received := make(chan error, 2)
	go func() { received <- p.there.receive(target, &p.back) }()
	go func() { received <- p.back.receive(source, nil) }()
	// Two never get on their way.
	for _, number := range []byte{0, 3, 4} {
		if _, err := source.Write([]byte{0, 0, 0, 0, 0, 0, 0, number}); err != nil {
			t.Fatal(err)
		}
	}
	p.there.sent.Store(5)
	time.Sleep(drain)
	target.Close()
	source.Close()
	for range 2 {
		if err := <-received; err != nil {
			t.Error(err)
		}
	}
	if there, back, sent := p.there.lost(), p.back.lost(), p.back.sent.Load(); there != 2 || back != 0 || sent != 3 {
		t.Errorf("there %d lost, back %d of %d; want 2, and none of 3", there, back, sent)
	}
}

func TestImageSize(t *testing.T) {
	image, err := random.Image(1000, 3)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	path, err := layout.Write(dir, empty.Index)
	if err != nil {
		t.Fatal(err)
	}
	if err := path.AppendIndex(mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: image})); err != nil {
		t.Fatal(err)
	}
	archive := filepath.Join(t.TempDir(), "image.tar")
	pack(t, dir, archive)
	compressed, unpacked, err := imageSize(archive)
	if err != nil {
		t.Fatal(err)
	}
	// What is random does not get smaller.
	if unpacked != 3000 || compressed < 3000 || compressed > 20000 {
		t.Errorf("%g compressed, %g unpacked, of three layers with 1000 random bytes each", compressed, unpacked)
	}
}

func TestField(t *testing.T) {
	const text = "Name:\tebpf-agent\nVmHWM:\t   57864 kB\nVmRSS:\t   57863 kB\n"
	for name, want := range map[string]float64{"VmRSS:": 57863, "VmHWM:": 57864, "VmSwap:": 0} {
		if got := field([]byte(text), name); got != want {
			t.Errorf("%s %g, want %g", name, got, want)
		}
	}
}

// The kernel tells a process the same of itself, in another way.
func TestCPUTime(t *testing.T) {
	used := func() time.Duration {
		var usage unix.Rusage
		if err := unix.Getrusage(unix.RUSAGE_SELF, &usage); err != nil {
			t.Fatal(err)
		}
		return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
	}
	began := used()
	before, err := cpuTime(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	// However little the machine has left for this one.
	for used()-began < 100*time.Millisecond {
		continue
	}
	after, err := cpuTime(os.Getpid())
	if took := used() - began; err != nil || after-before < 50*time.Millisecond || after-before > took+50*time.Millisecond {
		t.Errorf("%s of CPU time where the kernel says %s, %v", after-before, took, err)
	}
	if _, err := cpuTime(1 << 30); err == nil {
		t.Error("a process that is not there has used nothing")
	}
}

// The Nodes that no kubelet stands for are all different, and none is a machine's.
func TestPaper(t *testing.T) {
	images, err := nodeImages()
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for i := 2; i < 5000; i++ {
		node := paper(i, images)
		if size := node.Size(); size < 10_000 || size > 30_000 {
			t.Fatalf("%s has %d bytes, and those of clusters in use have 10 to 30 KB", node.Name, size)
		}
		addr := netip.MustParseAddr(node.Status.Addresses[0].Address)
		if podCIDR := netip.MustParsePrefix(node.Spec.PodCIDR); podCIDR != podCIDR.Masked() || seen[podCIDR.String()] || seen[addr.String()] || addr.As4()[2] == 0 {
			t.Fatalf("%s has %s and %s", node.Name, addr, podCIDR)
		}
		seen[addr.String()], seen[node.Spec.PodCIDR] = true, true
	}
}

func TestMedian(t *testing.T) {
	for want, values := range map[float64][]float64{2: {3, 1, 2}, 2.5: {4, 1, 2, 3}, 0: nil} {
		if got := median(values); got != want {
			t.Errorf("median of %v: %g", values, got)
		}
	}
}

// pack writes everything in dir as a tar.
func pack(t *testing.T, dir, archive string) {
	t.Helper()
	file, err := os.Create(archive)
	if err != nil {
		t.Fatal(err)
	}
	w := tar.NewWriter(file)
	if err := errors.Join(w.AddFS(os.DirFS(dir)), w.Close(), file.Close()); err != nil {
		t.Fatal(err)
	}
}

func TestBornAt(t *testing.T) {
	before := time.Now()
	child := exec.CommandContext(t.Context(), "sleep", "60")
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	after := time.Now()
	time.Sleep(100 * time.Millisecond)
	born, err := bornAt(child.Process.Pid)
	if err != nil || born.Before(before.Add(-2*tick)) || born.After(after.Add(2*tick)) {
		t.Errorf("born at %s, want between %s and %s; %v", born, before, after, err)
	}
	if err := child.Process.Kill(); err != nil {
		t.Error(err)
	}
	_ = child.Wait()
	if _, err := bornAt(child.Process.Pid); err == nil {
		t.Error("a process that has ended was born at some time")
	}
}
