from citadel.cli import main

raise SystemExit(main())
