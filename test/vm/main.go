// Command vm runs the tests that need a kernel on other kernels than the running one, in virtual machines without disk or
// network: `make test-kernels`. Its exit status is 0 only if on each kernel every test has passed or was expected to be
// skipped there, and the kernel did not complain.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	ok, err := start(ctx)
	if err != nil {
		fmt.Fprintln(os.Stderr, "test-kernels:", err)
	}
	if !ok || err != nil {
		stop()
		os.Exit(1) //nolint:gocritic // stop has been called
	}
}

// session is one call of the command.
type session struct {
	workshop *workshop
	machine  machine
	options  testOptions
	again    int // so many failed tests at most run once more
	failed   bool
	count    map[string]int // of tests, by verdict
	unsteady []string       // a line for each machine that has such tests
}

func start(ctx context.Context) (bool, error) {
	var kernels, modules, cache, only, flags string
	s := session{count: make(map[string]int)}
	flag.StringVar(&kernels, "kernel", "6.1 6.12", "series of Debian's kernels, or the path of one image")
	flag.StringVar(&modules, "modules", "", "with an image: the directory of its modules")
	flag.StringVar(&cache, "cache", "", "where Debian's kernels are kept; default ~/.cache/ebpf-cni/kernels")
	flag.StringVar(&only, "packages", "", "packages to test; default all that ask the kernel for something")
	flag.StringVar(&flags, "testflags", "", "-run, -v, and the packages' own flags")
	flag.IntVar(&s.again, "again", 0, "if no more tests than these fail on a machine, they run once more, alone")
	flag.BoolVar(&s.options.update, "update", false, "write the bounds of the verifier's work anew")
	flag.StringVar(&s.machine.qemu, "qemu", "qemu-system-x86_64", "")
	// With a thread for each processor, one now and then runs an instruction that the kernel has just rewritten on the other, and oopses.
	flag.StringVar(&s.machine.accel, "accel", "tcg,thread=single", "what qemu emulates processors with")
	// Copying byte by byte, which a real processor is fast at, is slow to emulate.
	flag.StringVar(&s.machine.cpu, "cpu", "max,la57=off,erms=off,fsrm=off", "the emulated processor")
	flag.StringVar(&s.machine.args, "append", "", "for the kernel's command line, such as ipv6.disable=1")
	flag.IntVar(&s.machine.processors, "smp", 2, "processors")
	flag.IntVar(&s.machine.mb, "mb", 2048, "memory in MiB")
	flag.DurationVar(&s.machine.timeout, "timeout", 40*time.Minute, "for one kernel")
	flag.Parse()

	update := s.options.update
	options, err := parseTestFlags(strings.Fields(flags))
	if err != nil {
		return false, err
	}
	s.options = options
	s.options.update, s.options.seconds = update, int(s.machine.timeout.Seconds())
	if cache == "" {
		base, err := os.UserCacheDir()
		if err != nil {
			return false, fmt.Errorf("choose where to keep kernels: %w", err)
		}
		cache = filepath.Join(base, "ebpf-cni", "kernels")
	}
	chosen := packages
	if fields := strings.Fields(only); len(fields) > 0 {
		chosen, s.options.named = fields, true
	}
	return s.run(ctx, strings.Fields(kernels), modules, cache, chosen)
}

func (s *session) run(ctx context.Context, names []string, modules, cache string, packages []string) (bool, error) {
	var kernels []kernel
	for _, name := range names {
		k, err := findKernel(ctx, name, modules, cache)
		if err != nil {
			return false, err
		}
		if err := k.loadModules(); err != nil {
			return false, err
		}
		kernels = append(kernels, k)
	}
	dir, err := os.MkdirTemp("", "ebpf-cni-vm-")
	if err != nil {
		return false, err
	}
	defer os.RemoveAll(dir)
	root, err := moduleRoot(ctx)
	if err != nil {
		return false, err
	}
	s.workshop, err = build(ctx, root, dir, packages, s.options)
	if err != nil {
		return false, err
	}
	if err := s.testAll(ctx, kernels); err != nil {
		return false, err
	}
	for _, line := range s.unsteady {
		fmt.Println(line)
	}
	fmt.Printf("%d passed, %d failed, %d skipped\n", s.count["PASS"], s.count["FAIL"], s.count["SKIP"])
	return !s.failed, nil
}

func moduleRoot(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "env", "GOMOD").Output()
	if err != nil {
		return "", fmt.Errorf("go env GOMOD: %w", err)
	}
	return filepath.Dir(strings.TrimSpace(string(out))), nil
}

// testAll tests the kernels, on as many machines at once as there are processors, since one whose processors are emulated by one thread
// leaves the others idle. What they say is printed machine by machine: the first one's as it comes, the others' at the end.
func (s *session) testAll(ctx context.Context, kernels []kernel) error {
	var reports []*report
	for _, k := range kernels {
		suites, err := s.options.suites(s.workshop.suites, k.series)
		if err != nil {
			return fmt.Errorf("kernel %s: %w", k.name, err)
		}
		for _, part := range machines(suites) {
			reports = append(reports, &report{session: s, kernel: k, suites: part})
		}
	}
	var running errgroup.Group
	running.SetLimit(runtime.NumCPU())
	said := make([]bytes.Buffer, len(reports))
	for i, r := range reports {
		r.out = &said[i]
		if i == 0 {
			r.out = os.Stdout
		}
		running.Go(func() error {
			return s.test(ctx, r)
		})
	}
	err := running.Wait()
	for i, r := range reports {
		fmt.Print(said[i].String())
		s.add(r)
	}
	return errors.Join(err, ctx.Err())
}

// testOnce runs suites on a machine.
func (s *session) testOnce(ctx context.Context, r *report) error {
	root, err := s.workshop.image(r.kernel, r.suites)
	if err != nil {
		return fmt.Errorf("kernel %s: %w", r.kernel.name, err)
	}
	defer os.Remove(root)
	s.boot(ctx, r, root)
	return nil
}

// boot starts the machine and reports what comes of it.
func (s *session) boot(ctx context.Context, r *report, root string) {
	started := time.Now()
	console := root + ".console"
	broken := s.machine.boot(ctx, r.kernel.image, root, console, r.frame)
	text, err := os.ReadFile(console)
	if err != nil && broken == nil {
		broken = err
	}
	r.finish(string(text), broken)
	verdict := "passed"
	if r.failed {
		verdict = "FAILED"
	}
	fmt.Fprintf(r.out, "=== kernel %s (%s): %s after %.0f s\n", r.kernel.name, r.release, verdict, time.Since(started).Seconds())
}

// add counts what one kernel's tests came to.
func (s *session) add(r *report) {
	s.failed = s.failed || r.failed
	hows := []string{"PASS", "FAIL", "SKIP"}
	if r.unsteady != "" {
		hows = []string{"PASS", "SKIP"}
		s.unsteady = append(s.unsteady, fmt.Sprintf("unsteady: kernel %s: %s", r.kernel.name, r.unsteady))
	}
	for _, how := range hows {
		for _, c := range r.results {
			s.count[how] += len(c.verdicts(how))
		}
	}
}
