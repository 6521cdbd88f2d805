package agent

import (
	"bufio"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"testing"
	"time"
)

// freeAddress is one to listen on.
func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	must(t, l.Close())
	return l.Addr().String()
}

func dialFrom(t *testing.T, from, to string) net.Conn {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}, Timeout: 10 * time.Second}
	conn, err := d.Dial("tcp", to)
	must(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// getOver asks over a connection that stays open.
func getOver(t *testing.T, conn net.Conn, path string) error {
	t.Helper()
	request, err := http.NewRequest(http.MethodGet, "http://agent"+path, nil)
	must(t, err)
	must(t, conn.SetDeadline(time.Now().Add(10*time.Second)))
	if err := request.Write(conn); err != nil {
		return err
	}
	response, err := http.ReadResponse(bufio.NewReader(conn), request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	_, err = io.Copy(io.Discard, response.Body)
	return err
}

// isOpen reports whether the other end has left a connection open.
func isOpen(t *testing.T, conn net.Conn) bool {
	t.Helper()
	must(t, conn.SetReadDeadline(time.Now().Add(time.Millisecond)))
	_, err := conn.Read(make([]byte, 1))
	return errors.Is(err, os.ErrDeadlineExceeded)
}

// Connections that somebody opens and leaves idle are few for the agent, and take nobody else's.
func TestConnectionsAreBounded(t *testing.T) {
	cfg := Config{Listen: freeAddress(t), MetricsListen: freeAddress(t)}
	serving(t, cfg)
	for path, listener := range map[string]string{"/readyz": cfg.Listen, "/metrics": cfg.MetricsListen} {
		t.Run(path[1:], func(t *testing.T) {
			eventually(t, "it answers", func() bool { return answers("http://" + listener + path) })
			other := dialFrom(t, "127.0.0.3", listener)
			must(t, getOver(t, other, path))
			var flood []net.Conn
			for range maxConnections + 200 {
				conn := dialFrom(t, "127.0.0.2", listener)
				must(t, getOver(t, conn, "/nothing")) // from now on it may be idle for longer
				flood = append(flood, conn)
			}
			eventually(t, "most are closed", func() bool {
				open := 0
				for _, conn := range flood {
					if isOpen(t, conn) {
						open++
					}
				}
				return open < maxConnections
			})
			if err := getOver(t, other, path); err != nil {
				t.Errorf("who was there before is cut off: %v", err)
			}
			if err := getOver(t, dialFrom(t, "127.0.0.4", listener), path); err != nil {
				t.Errorf("who comes later is not answered: %v", err)
			}
			if err := getOver(t, dialFrom(t, "127.0.0.2", listener), path); err != nil {
				t.Errorf("who comes later from the same address is not answered: %v", err)
			}
		})
	}
}
