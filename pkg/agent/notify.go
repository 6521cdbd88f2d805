package agent

import (
	"fmt"
	"net"
	"time"
)

// notifyTimeout is how long a service manager that does not read may hold the loop up.
const notifyTimeout = 100 * time.Millisecond

// notifyReady tells the service manager that listens on a socket, as systemd does for units of Type=notify, that what waits for this
// agent may start. Without a socket nobody waits.
func notifyReady(socket string) error {
	if socket == "" {
		return nil
	}
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: socket, Net: "unixgram"})
	if err != nil {
		return fmt.Errorf("tell the service manager: %w", err)
	}
	defer conn.Close()
	if err = conn.SetWriteDeadline(time.Now().Add(notifyTimeout)); err == nil {
		_, err = conn.Write([]byte("READY=1"))
	}
	if err != nil {
		return fmt.Errorf("tell the service manager: %w", err)
	}
	return nil
}
